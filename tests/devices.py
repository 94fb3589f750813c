"""The device of the tests."""

import torch

CPU = torch.device("cpu")
