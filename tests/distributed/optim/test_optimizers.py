"""Which optimizer each table and layer gets, what is refused and how, and RowAdam against closed forms."""
