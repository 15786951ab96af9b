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

/** Return [busy, run, cancel]: `run` does one thing at a time, given a signal that `cancel` and leaving the view set. */
export function useTask() {
  const [busy, setBusy] = useState(false);
  const controller = useRef(null);
  useEffect(() => () => controller.current?.abort(), []);
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
  return [busy, run, () => controller.current?.abort()];
}

/** Whether the reader wants nothing to move. */
export function wantsStillness() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
