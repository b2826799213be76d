"""Costs that a plan rests on: measured by workers, told, and put together by the controller."""
