"""The policy ``auto``: plans every round by what passes cost and by how likely drafts are."""
