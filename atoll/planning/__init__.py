"""Pure planners that workers and the controller share."""
