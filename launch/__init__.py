"""Entry points: compose the configuration, build the groups, run."""

from tandem.platform.system.search_path import forget_script_folder

forget_script_folder()
