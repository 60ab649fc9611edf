"""Tables in CSV and Parquet files as examples, also windows of time series.

Start in tables.py.
"""
