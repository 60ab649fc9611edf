"""Text files as examples: tokens for a language model, and classes of text.

Start in text.py.
"""
