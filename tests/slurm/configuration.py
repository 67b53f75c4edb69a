"""The configuration files of a private Slurm, with places for its ports and folders."""

# Heterogeneous jobs start by backfill only, so it runs often. A requeued job waits for as long as
# credentials last, two minutes by default.
SLURM_CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={sockets}/munge,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={sockets}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/steps-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting_port}
AccountingStoragePass={sockets}/munge
GresTypes=gpu
{nodes}
PartitionName=debug Nodes=ALL Default=YES PriorityTier=2 PreemptMode=OFF
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE
"""
SLURMDBD_CONF = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={accounting_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={sockets}/munge
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
"""
