"""The part of a step beside the embeddings is traced, measured, or priced by a data sheet.

The layers and optimizers themselves are in `model`.
"""
