// Light or dark: the system's choice until the switch is used.

const STORED = "warmroute-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function apply() {
  document.documentElement.dataset.theme = localStorage.getItem(STORED) ?? (dark.matches ? "dark" : "light");
}

export function startTheme() {
  apply();
  dark.addEventListener("change", apply);
}

export function switchTheme() {
  localStorage.setItem(STORED, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  apply();
}
