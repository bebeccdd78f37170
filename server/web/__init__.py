"""What every request passes before a path answers it: the guard, its body, its checks; and how
replies are sent.
"""
