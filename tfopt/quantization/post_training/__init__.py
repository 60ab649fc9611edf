"""Post-training quantization: equalization, SmoothQuant, bias correction, AdaRound.

Start in post_training.py, which applies the techniques in order; each has its own file.
"""
