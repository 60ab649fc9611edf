"""TFRecord files: any examples written as shards with checksums and a schema, and read back.

Start in tfopt/data/examples.py.
"""
