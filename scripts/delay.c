/* Delays every packet that the named network namespaces receive by a constant time, for kernels without sch_netem.
 *
 *   delay MICROSECONDS NAMESPACE ...     each namespace puts its packets into its NFQUEUE number 0
 *
 * Only the packets' numbers come to user space; "accept all numbers up to X" is answered once X has waited. So order
 * is kept, packets that segmentation offload has merged stay whole, and gigabits per second pass.
 * Says "ready" when all queues are open; ends with SIGTERM. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink_queue.h>
#include <linux/netlink.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_QUEUES = 64, RING = 1 << 17, MESSAGE = 512 };

struct queue {
    int socket;
    uint32_t *number; /* of packets that wait, in the order of their arrival */
    uint64_t *due;    /* when each may go on, ns */
    unsigned head, tail;
};

static struct queue queues[MAX_QUEUES];
static volatile sig_atomic_t stopped;
static char received[1 << 18];

static void stop(int signal_number) {
    (void)signal_number;
    stopped = 1;
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static struct nlmsghdr *begin(char *buffer, int type, int flags) {
    struct nlmsghdr *header = (void *)buffer;
    memset(buffer, 0, MESSAGE);
    header->nlmsg_len = NLMSG_LENGTH(sizeof(struct nfgenmsg));
    header->nlmsg_type = (NFNL_SUBSYS_QUEUE << 8) | type;
    header->nlmsg_flags = NLM_F_REQUEST | flags;
    struct nfgenmsg *generic = NLMSG_DATA(header);
    generic->nfgen_family = AF_UNSPEC;
    generic->version = NFNETLINK_V0;
    return header;
}

static void add(struct nlmsghdr *header, int type, const void *value, int length) {
    struct nlattr *attribute = (void *)((char *)header + NLMSG_ALIGN(header->nlmsg_len));
    attribute->nla_type = type;
    attribute->nla_len = NLA_HDRLEN + length;
    memcpy((char *)attribute + NLA_HDRLEN, value, length);
    header->nlmsg_len = NLMSG_ALIGN(header->nlmsg_len) + NLA_ALIGN(attribute->nla_len);
}

static void transmit(int socket, struct nlmsghdr *header) {
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    if (sendto(socket, header, header->nlmsg_len, 0, (void *)&kernel, sizeof kernel) < 0) fail("delay: send");
}

static void configure(int socket, struct nlmsghdr *header) {
    char answer[4096];
    transmit(socket, header);
    struct nlmsghdr *reply = (void *)answer;
    if (recv(socket, answer, sizeof answer, 0) <= 0) fail("delay: configure");
    if (reply->nlmsg_type == NLMSG_ERROR && ((struct nlmsgerr *)NLMSG_DATA(reply))->error) {
        fprintf(stderr, "delay: the kernel refuses NFQUEUE\n");
        exit(1);
    }
}

static void open_queue(struct queue *queue, const char *name) {
    char path[256], buffer[MESSAGE];
    snprintf(path, sizeof path, "/var/run/netns/%s", name);
    int namespace = open(path, O_RDONLY);
    if (namespace < 0 || setns(namespace, CLONE_NEWNET)) fail(path);
    close(namespace);
    int room = 64 << 20, yes = 1;
    struct sockaddr_nl own = {.nl_family = AF_NETLINK};
    queue->socket = socket(AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER);
    if (queue->socket < 0 || bind(queue->socket, (void *)&own, sizeof own)) fail("delay: socket");
    setsockopt(queue->socket, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
    setsockopt(queue->socket, SOL_NETLINK, NETLINK_NO_ENOBUFS, &yes, sizeof yes);
    struct nfqnl_msg_config_cmd bind_queue = {.command = NFQNL_CFG_CMD_BIND};
    struct nlmsghdr *header = begin(buffer, NFQNL_MSG_CONFIG, NLM_F_ACK);
    add(header, NFQA_CFG_CMD, &bind_queue, sizeof bind_queue);
    configure(queue->socket, header);
    struct nfqnl_msg_config_params numbers_only = {.copy_range = 0, .copy_mode = NFQNL_COPY_META};
    uint32_t flags = htonl(NFQA_CFG_F_GSO | NFQA_CFG_F_FAIL_OPEN), length = htonl(100000);
    header = begin(buffer, NFQNL_MSG_CONFIG, NLM_F_ACK);
    add(header, NFQA_CFG_PARAMS, &numbers_only, sizeof numbers_only);
    add(header, NFQA_CFG_FLAGS, &flags, sizeof flags);
    add(header, NFQA_CFG_MASK, &flags, sizeof flags);
    add(header, NFQA_CFG_QUEUE_MAXLEN, &length, sizeof length);
    configure(queue->socket, header);
    queue->number = malloc(RING * sizeof *queue->number);
    queue->due = malloc(RING * sizeof *queue->due);
    if (!queue->number || !queue->due) fail("delay: memory");
}

/* Let go what has waited; returns when the next packet is due. */
static uint64_t release(struct queue *queue, uint64_t time) {
    char buffer[MESSAGE];
    uint32_t last = 0;
    int any = 0;
    while (queue->head != queue->tail && queue->due[queue->head % RING] <= time) {
        last = queue->number[queue->head++ % RING];
        any = 1;
    }
    if (any) {
        struct nfqnl_msg_verdict_hdr verdict = {.verdict = htonl(NF_ACCEPT), .id = htonl(last)};
        struct nlmsghdr *header = begin(buffer, NFQNL_MSG_VERDICT_BATCH, 0);
        add(header, NFQA_VERDICT_HDR, &verdict, sizeof verdict);
        transmit(queue->socket, header);
    }
    return queue->head != queue->tail ? queue->due[queue->head % RING] : UINT64_MAX;
}

static void take_in(struct queue *queue, uint64_t due) {
    int length = recv(queue->socket, received, sizeof received, MSG_DONTWAIT);
    struct nlmsghdr *header = (void *)received;
    for (; length > 0 && NLMSG_OK(header, (unsigned)length); header = NLMSG_NEXT(header, length)) {
        if ((header->nlmsg_type & 0xff) != NFQNL_MSG_PACKET) continue;
        char *end = (char *)header + header->nlmsg_len;
        struct nlattr *attribute = (void *)((char *)NLMSG_DATA(header) + NLMSG_ALIGN(sizeof(struct nfgenmsg)));
        while ((char *)attribute + NLA_HDRLEN <= end && attribute->nla_len >= NLA_HDRLEN) {
            if ((attribute->nla_type & NLA_TYPE_MASK) == NFQA_PACKET_HDR) {
                struct nfqnl_msg_packet_hdr *packet = (void *)((char *)attribute + NLA_HDRLEN);
                queue->number[queue->tail % RING] = ntohl(packet->packet_id);
                queue->due[queue->tail++ % RING] = due;
                break;
            }
            attribute = (void *)((char *)attribute + NLA_ALIGN(attribute->nla_len));
        }
    }
}

int main(int argc, char **argv) {
    int count = argc - 2;
    if (count < 1 || count > MAX_QUEUES) {
        fprintf(stderr, "usage: delay MICROSECONDS NAMESPACE ... (at most %d)\n", MAX_QUEUES);
        return 2;
    }
    uint64_t delay = strtoull(argv[1], NULL, 10) * 1000;
    struct pollfd polled[MAX_QUEUES];
    prctl(PR_SET_TIMERSLACK, 1000);
    signal(SIGTERM, stop);
    for (int i = 0; i < count; i++) {
        open_queue(&queues[i], argv[i + 2]);
        polled[i] = (struct pollfd){.fd = queues[i].socket, .events = POLLIN};
    }
    puts("ready");
    fflush(stdout);
    while (!stopped) {
        uint64_t time = now(), next = UINT64_MAX;
        for (int i = 0; i < count; i++) {
            uint64_t due = release(&queues[i], time);
            if (due < next) next = due;
        }
        struct timespec wait, *limit = NULL;
        if (next != UINT64_MAX) {
            time = now();
            uint64_t left = next > time ? next - time : 0;
            wait = (struct timespec){.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
            limit = &wait;
        }
        if (ppoll(polled, count, limit, NULL) <= 0) continue;
        for (int i = 0; i < count; i++)
            if (polled[i].revents) take_in(&queues[i], now() + delay);
    }
    return 0;
}
