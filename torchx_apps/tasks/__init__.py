"""Tasks: what a recipe's data is, and what is asked of a model about it."""
