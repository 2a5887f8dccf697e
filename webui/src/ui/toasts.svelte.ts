/** Short notices at the bottom of the page, some with one thing that can be done about them (mostly: undo). */
export interface Toast {
  id: number;
  text: string;
  isTrouble: boolean;
  action: { label: string; run: () => void } | null;
}

const SHOWN_MS = 4_000;
const SHOWN_WITH_ACTION_MS = 10_000; // long enough to be read, understood and reached by keyboard

class Toasts {
  list = $state<Toast[]>([]);
  #nextId = 0;

  show(text: string, options: { isTrouble?: boolean; action?: Toast["action"] } = {}): void {
    const id = this.#nextId++;
    const action = options.action ?? null;
    this.list.push({ id, text, isTrouble: options.isTrouble ?? false, action });
    setTimeout(() => this.close(id), action ? SHOWN_WITH_ACTION_MS : SHOWN_MS);
  }

  close(id: number): void {
    this.list = this.list.filter((toast) => toast.id !== id);
  }
}

export const toasts = new Toasts();
