"""The relay: joins connections of machines that cannot dial each other, blindly. Agents use its client half."""
