"""Planners of others, for comparison: TorchRec's, NVIDIA's, and NeuroShard's published search."""
