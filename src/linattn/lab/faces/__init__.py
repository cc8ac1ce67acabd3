"""FaceNet: an embedding in which distance means identity."""
