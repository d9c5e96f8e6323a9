"""Ray actors of the five roles, the groups that drive them, engines, placement and weight sync."""
