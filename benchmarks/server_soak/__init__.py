"""``paceline serve`` under clients that cancel, stall, break off and send what is wrong."""
