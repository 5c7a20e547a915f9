"""The members of a grid: each an ordinary training, then a table and a picture of all."""
