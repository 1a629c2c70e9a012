/* SPDX-License-Identifier: Apache-2.0 */
/* Everything libkvclient offers. Read types.h first: it has the words. */
#ifndef KVCACHED_KVCACHED_H
#define KVCACHED_KVCACHED_H

#include <kvcached/types.h>
#include <kvcached/layout.h>
#include <kvcached/client.h>
#include <kvcached/sequence.h>
#include <kvcached/identity.h>
#include <kvcached/keys.h>
#include <kvcached/group.h>
#include <kvcached/batch.h>
#include <kvcached/attention.h>
#include <kvcached/backend.h>
#include <kvcached/tensor.h>
#include <kvcached/state.h>
#include <kvcached/dsa.h>
#include <kvcached/merge.h>
#include <kvcached/metadata.h>
#include <kvcached/table.h>
#include <kvcached/slots.h>
#include <kvcached/mla.h>
#include <kvcached/schedule.h>
#include <kvcached/recurrent.h>
#include <kvcached/rope.h>
#include <kvcached/stats.h>
#include <kvcached/arch.h>
#include <kvcached/plan.h>

#endif
