"""``paceline serve``: a loaded model behind HTTP."""
