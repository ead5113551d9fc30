"""What XLA will make of a plan: which values become buffers, when they live, where they lie, and the peak."""

from remat.memory.predict import Prediction, predict

__all__ = ["Prediction", "predict"]
