from .config import Codistillation as Codistillation
from .skeleton import StackError as StackError
from .stack import Stack as Stack
from .training import Member as Member
from .training import train_stack as train_stack
