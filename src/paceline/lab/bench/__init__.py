"""``paceline bench``: plain, hand-set and planned speculation on several kinds of text, in interleaved pairs."""
