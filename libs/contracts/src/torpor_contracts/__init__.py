"""Torpor's published language: identifiers, commands, events, receipts and refusals; no behaviour."""
