"""Data sets by name: MovieLens, Frappe, Amazon Beauty, generated ones, and folders of one's own."""
