"""Sigmoid focal loss of detectors: apex.contrib.focal_loss.focal_loss holds the function and FocalLoss."""
