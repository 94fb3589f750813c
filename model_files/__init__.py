"""Opens a model's files without a tensor library: shape facts, tensor index, tokenizer, dequantised rows."""

from model_files.errors import ModelRefused
from model_files.model import ModelFiles
from model_files.opening import open_model
from model_files.tensors import TensorInfo, expected_tensors

__all__ = ["ModelFiles", "ModelRefused", "TensorInfo", "expected_tensors", "open_model"]
