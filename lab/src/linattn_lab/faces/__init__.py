"""FaceNet: embeddings whose distances tell people apart."""
