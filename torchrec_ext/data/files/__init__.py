"""Parquet and Arrow files: found, checked and read row group by row group."""
