"""rooftile: what do a step's numbers survive, and what does it move?"""
