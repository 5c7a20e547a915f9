"""Two sub-networks over dense features and a small network on top, in plain torch: what a user has.

python examples/towers_script.py [FILE], which gets the weights.
"""

import sys

import torch
from torch import Tensor, nn


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


def main(path: str) -> None:
    """Trains for 20 steps, evaluates, and saves the weights to ``path``."""
    torch.manual_seed(0)
    model, criterion = UserAndItem(), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    profile, content = torch.randn(21, 1024, 60), torch.randn(21, 1024, 40)
    label = (profile[..., 0] * content[..., 0] > 0).float()
    for step in range(20):
        optimizer.zero_grad()
        loss = criterion(model(profile[step], content[step]), label[step])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held_out = criterion(model(profile[20], content[20]), label[20])
    print(f"loss {loss.item():.5f}, held out {held_out.item():.5f}")
    torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["towers.pt"])
