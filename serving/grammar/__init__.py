"""Descriptions of answers, compiled to grammars of llguidance, or of xgrammar for its own forms."""
