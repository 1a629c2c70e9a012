/* SPDX-License-Identifier: Apache-2.0 */
/* Marks the definition of a function that libkvclient.so exports; all others are hidden. */
#ifndef KV_INTERNAL_PUBLIC_H
#define KV_INTERNAL_PUBLIC_H

#define KV_PUBLIC __attribute__((visibility("default")))

#endif
