"""Tests run on the CPU, with gloo, whatever the machine has; those marked gpu say otherwise."""

import os

GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
