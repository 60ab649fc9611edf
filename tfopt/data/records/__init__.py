"""TFRecord files: any examples written as shards with checksums and a schema, and read back.

Start in convert.py; tfopt/data/files/tfrecord.py reads what it wrote.
"""
