"""Examining a target and a draft model: how their tokens relate, how often they agree, and what drafting gains."""
