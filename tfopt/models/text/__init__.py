"""Builders of models of text: encoders and decoders, and the generation of text.

Start in encoder.py; decoder.py has gpt, and generation.py continues a text with it.
"""
