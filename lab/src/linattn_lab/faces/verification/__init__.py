"""Comparing faces: metrics, baselines, confidence, clustering."""
