// Answers that are being written: begun, drawn no oftener than the screen is, cancelled.

import { useEffect, useRef, useState } from "./vendor/htm-preact-standalone.module.js";

/** Return a function that has the component drawn anew with the next frame of the screen. */
export function useRedraw() {
  const [, setCount] = useState(0);
  const asked = useRef(0);
  useEffect(() => () => cancelAnimationFrame(asked.current), []);
  return useRef(() => {
    asked.current ||= requestAnimationFrame(() => {
      asked.current = 0;
      setCount((count) => count + 1);
    });
  }).current;
}

/**
 * Return [busy, run, cancel]: `run` does one thing at a time, given a signal that `cancel` and leaving the view set. Where the
 * view is shown, Escape cancels too.
 */
export function useTask(isShown) {
  const [busy, setBusy] = useState(false);
  const controller = useRef(null);
  const cancel = () => controller.current?.abort();
  useEffect(() => cancel, []);
  const isSeen = useRef(isShown);
  isSeen.current = isShown;
  useEffect(() => {
    if (!busy) return undefined;
    const pressed = (event) => {
      // What is open over the page takes the key first.
      const isOurs = event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open], :popover-open");
      if (isOurs && isSeen.current) cancel();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [busy]);
  const run = async (work) => {
    if (controller.current) return;
    controller.current = new AbortController();
    setBusy(true);
    try {
      await work(controller.current.signal);
    } finally {
      controller.current = null;
      setBusy(false);
    }
  };
  return [busy, run, cancel];
}

/**
 * Return a reference to what gets the focus when whatever has it goes away, or cannot be used any more: a button may do
 * either once it was pressed, and the keyboard would begin anew at the top of the page.
 */
export function useFocusKept(isShown) {
  const place = useRef(null);
  const last = useRef(null);
  useEffect(() => {
    const note = (event) => { last.current = event.target; };
    addEventListener("focusin", note);
    return () => removeEventListener("focusin", note);
  }, []);
  useEffect(() => {
    const { current } = last;
    if (!isShown || !current || (current.isConnected && !current.disabled)) return;
    if (document.activeElement === document.body || document.activeElement === current) place.current?.focus({ preventScroll: true });
  });
  return place;
}

/** Whether the reader wants nothing to move. */
export function wantsStillness() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
