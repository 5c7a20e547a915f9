"""The members of a grid: each an ordinary training, then a table of all."""
