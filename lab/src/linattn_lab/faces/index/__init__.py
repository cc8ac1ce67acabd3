"""An index of faces that grows, is shared by processes, and is searched exactly."""

from .face_index import Face, FaceIndex, IndexExists, file_digest

__all__ = ["Face", "FaceIndex", "IndexExists", "file_digest"]
