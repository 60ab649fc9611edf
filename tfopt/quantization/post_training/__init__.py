"""Post-training quantization: equalization, SmoothQuant, bias correction, AdaRound.

Start in post_training.py, which applies the techniques in order and corrects the biases. The others have files.
"""
