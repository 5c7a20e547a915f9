"""A user's Dataset as columns: its rows are read, its draws are tested, and batches are made by torch ops."""
