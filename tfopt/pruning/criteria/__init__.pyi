from .gradients import LossGradients, mean_products
from .scores import CRITERIA, Criterion, needs_data, score_weights
from .sensitivity import Products

__all__ = ["CRITERIA", "Criterion", "LossGradients", "Products", "mean_products", "needs_data", "score_weights"]
