"""Builders of models of text: encoders and decoders, and the generation of text.

Start in transformers.py; generation.py continues a text with gpt.
"""
