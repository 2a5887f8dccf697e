/** The page's keys, in one list: what handles them and what tells of them read the same. */
export interface Shortcut {
  /** As `KeyboardEvent.key` has it, small. */
  key: string;
  /** Ctrl, or Cmd on a Mac. */
  isMod: boolean;
  isShift: boolean;
}

export const SHORTCUTS = {
  search: { key: "k", isMod: true, isShift: false },
  newChat: { key: "o", isMod: true, isShift: true },
  sidebar: { key: "b", isMod: true, isShift: true },
  settings: { key: ",", isMod: true, isShift: false },
} as const satisfies Record<string, Shortcut>;

export type ShortcutName = keyof typeof SHORTCUTS;

const isMac = /Mac|iPhone|iPad/.test(navigator.platform);

/** As it is printed on the keys: "Ctrl+Shift+O", or "⇧⌘O" on a Mac. */
export function spelled(shortcut: Shortcut): string {
  const key = shortcut.key.toUpperCase();
  if (isMac) return `${shortcut.isShift ? "⇧" : ""}${shortcut.isMod ? "⌘" : ""}${key}`;
  return [shortcut.isMod && "Ctrl", shortcut.isShift && "Shift", key].filter(Boolean).join("+");
}

/** Which of the page's shortcuts was pressed, if any. */
export function shortcutOf(event: KeyboardEvent): ShortcutName | null {
  if (event.altKey) return null;
  const isMod = isMac ? event.metaKey : event.ctrlKey;
  const pressed = event.key.toLowerCase();
  for (const name of Object.keys(SHORTCUTS) as ShortcutName[]) {
    const { key, isMod: wantsMod, isShift } = SHORTCUTS[name];
    if (key === pressed && wantsMod === isMod && isShift === event.shiftKey) return name;
  }
  return null;
}

/** Whether a key pressed here would be written as a letter. */
export function isWriting(target: EventTarget | null): boolean {
  return (
    target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName))
  );
}
