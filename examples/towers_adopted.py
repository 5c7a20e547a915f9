"""Two sub-networks over dense features and a small network on top, each on a process of its own by adopt_towers().

torchrun --standalone --nproc-per-node 2 examples/towers_adopted.py [FILE], which gets the weights.
"""

import sys

import torch
from torch import Tensor, nn

from torchrec_ext.adopt import adopt_towers
from torchrec_ext.distributed import Runtime


class UserAndItem(nn.Module):
    """A user's 60 numbers and an item's 40 to the logit of a click, (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(
            nn.Linear(60, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 64),
        )
        self.item = nn.Sequential(
            nn.Linear(40, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 64),
        )
        self.top = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, profile: Tensor, content: Tensor) -> Tensor:
        """Returns (B,) logits of (B, 60) and (B, 40) numbers."""
        return self.top(
            torch.cat([self.user(profile), self.item(content)], dim=1)
        ).squeeze(1)


def main(path: str, runtime: Runtime) -> None:
    """Trains for 20 steps, evaluates, and saves the weights to ``path``."""
    torch.manual_seed(0)
    model, criterion = UserAndItem(), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    profile, content = torch.randn(21, 1024, 60), torch.randn(21, 1024, 40)
    label = (profile[..., 0] * content[..., 0] > 0).float()
    example = profile[0], content[0], label[0]
    towers = {"user": 0, "item": 1}
    train = adopt_towers(
        model,
        optimizer,
        lambda u, i, y: criterion(model(u, i), y),
        runtime,
        towers,
        example,
    )
    for step in range(20):
        loss, _ = train(profile[step], content[step], label[step])
    train.settle()  # all ranks have all weights again
    model.eval()
    with torch.no_grad():
        held_out = criterion(model(profile[20], content[20]), label[20])
    if runtime.is_main:
        print(f"loss {loss.item():.5f}, held out {held_out.item():.5f}")
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    with Runtime.start("cpu") as runtime:
        main(*sys.argv[1:] or ["towers.pt"], runtime)
