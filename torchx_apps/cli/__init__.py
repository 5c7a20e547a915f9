"""The command line: recipes, overrides, errors, signals."""
