"""Descriptions of answers, read into grammars of llguidance, or of xgrammar for forms of its own."""
