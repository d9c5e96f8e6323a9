"""Entry points: compose the configuration, build the groups, run."""
