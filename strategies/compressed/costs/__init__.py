"""Measure the costs that a plan rests on, send them, and combine them in the controller."""
